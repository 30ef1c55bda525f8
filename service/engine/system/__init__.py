"""What any process of the engine needs of the operating system; imports nothing of the engine."""
