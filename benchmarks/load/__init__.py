"""What benchmarks of the replay pipeline put around it: synthetic actors and learners. Not a benchmark itself: `make bench` runs none of these."""
