"""What runs in the driver: the pool of replicas, their channels, recovery and weight updates."""
