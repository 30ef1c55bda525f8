"""The consumer of requests: a member of the group, a ledger and a transactional writer for each of its partitions."""
