"""The engine core's half: every model's context, and the routing of requests, calls and steps to theirs."""
