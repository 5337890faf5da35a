"""Who asks: keys, tenants, what they may do and how much of it, and the account of what they took."""
