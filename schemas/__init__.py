"""The wire contract: what travels on the bus, as pydantic models, and the codec between them and Kafka records.

Imports pydantic only, so that producers and consumers can use it without vLLM, torch or a Kafka client.
"""
