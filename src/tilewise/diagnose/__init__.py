"""What a sparse choice leaves out, and what that does to the output."""

from tilewise.diagnose.mass import MassAccount, RowAccount, account, block_logmass

__all__ = ["MassAccount", "RowAccount", "account", "block_logmass"]
