"""The part of the sentinel that runs on the GPU, without a host sync: signals, gate, mailbox."""
