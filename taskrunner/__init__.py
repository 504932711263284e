"""TaskRunner: distributed background jobs on Redis Streams."""
