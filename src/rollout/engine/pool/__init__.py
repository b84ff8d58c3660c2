"""The driver's engines: replicas kept alive, requests placed on them, answers gathered."""
