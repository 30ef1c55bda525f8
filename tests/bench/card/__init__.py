"""A run on a card: what switching models of real shape comes to, with weights that are random and made on the spot."""
