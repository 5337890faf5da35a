"""One model of time: how long prefills, decode steps and transfers take, learned online. Pure: no I/O, no clock."""
