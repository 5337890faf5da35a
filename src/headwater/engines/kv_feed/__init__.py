"""What engines of others tell about their KV caches, and how it becomes our own events."""
