"""Floor 4: the daemon threads, one file each; a file says what one round does."""
