"""Several servers of one model: replicas, the routers before them, and Ray Serve."""
