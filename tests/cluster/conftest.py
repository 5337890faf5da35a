"""Fixtures that several files here use."""

from frontend_rig import play as play
