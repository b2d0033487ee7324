"""The sentinel: signals of every step, the gate that may reject an update, detectors, and the recovery policy."""
