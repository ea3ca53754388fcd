"""One converter per protocol: from the fields of a body to what the engine takes."""
