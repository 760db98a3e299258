"""Rules of engines on written or planned outputs, with their conditions and evidence."""
