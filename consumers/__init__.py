"""Roles that consume: learner, parameter server, evaluator, monitor."""
