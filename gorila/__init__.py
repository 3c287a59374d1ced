"""What every role shares: the words on the wire, the configuration, the runtime loop, and the door to Kafka."""
