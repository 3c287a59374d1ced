"""Published Atari scores, one CSV a protocol."""
