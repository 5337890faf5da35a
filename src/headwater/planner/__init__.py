"""Which worker does what: observe recent traffic, try every plan of roles in fast simulation, decide. Pure."""
