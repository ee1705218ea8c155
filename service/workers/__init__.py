"""What runs in a conversion's worker process, and how the service starts, limits and ends one."""
