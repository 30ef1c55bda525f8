"""A pool upgraded part by part under load: workers, a broker, partitions, and from one version to the next."""
