"""The loops: requests to results, control events to switches, presence; one worker is all of them together."""
