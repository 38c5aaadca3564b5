"""Entry point of the command line. The commands themselves are in commands.py."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line.

    What a user can mend is one line on stderr: exit code 1 for bad input, 2 for a missing package.
    """
    try:
        from tilewise.commands import app

        app()
    except ImportError as error:
        advice = "" if "pip install" in str(error) else "; pip install 'tilewise[cli,viz]'"
        print(f"tilewise: {error}{advice}", file=sys.stderr)
        raise SystemExit(2) from None
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"tilewise: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
