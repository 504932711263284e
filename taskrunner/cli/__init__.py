"""Floor 5. The command line, one file per command."""
