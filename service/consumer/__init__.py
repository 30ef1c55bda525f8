"""Kafka: reading requests with a ledger, settling results, control state, announcements and topics."""
