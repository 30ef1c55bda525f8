"""The HTTP server: OpenAI's routes, models and switches, health, metrics, and the status page. Optional."""
