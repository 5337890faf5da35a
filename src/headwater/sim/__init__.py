"""A cluster in virtual time, made of the production classes: router, view, index, time model, scheduler, KV pool.

What is simulated is only what costs time on hardware: how long a step takes (`timing`) and how late news arrive. A
simulated decision is therefore a decision of the production code.
"""
