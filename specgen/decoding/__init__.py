"""The one loop, its executors, a generation, and a run's check of itself."""
