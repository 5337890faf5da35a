"""The router: which worker serves a request. Pure: events in, decisions out.

`view` holds what is known of the workers and what was sent to them, `policy` is the contract of a routing policy,
`policies` has the built-in ones, `router` puts them together.
"""
