"""What any client of the broker needs: connections, topics, reading and writing records, control events, presence."""
