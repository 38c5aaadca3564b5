"""`python -m tilewise`: the command line."""

from tilewise.cli import main

if __name__ == "__main__":
    main()
