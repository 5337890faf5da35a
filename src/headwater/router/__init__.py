"""Which worker serves a request. Pure core: views and events in, choices out."""
