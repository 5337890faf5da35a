"""What kinds of servers there are, and how each is spoken to."""
