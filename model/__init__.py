"""Pure core of pushkv: protocol, layout, timing and routing; no clock, thread, socket or file."""
