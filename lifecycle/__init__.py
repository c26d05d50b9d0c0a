"""The request lifecycle as pure values: events in, states out, no clock, randomness or IO."""
