"""Floor 2: everything that talks to Redis, one file per kind of key."""
