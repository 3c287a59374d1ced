"""Shipped for those who write their own roles and environments: drive a processor without Kafka, play the smallest pixel game.

Import from the modules: `gorila.testing.driver` (ProcessorTestDriver), `gorila.testing.memory_log` (a Kafka in memory), `gorila.testing.catch`
(an environment; needs gymnasium). Nothing is imported here, so that none of them drags the others in.
"""
