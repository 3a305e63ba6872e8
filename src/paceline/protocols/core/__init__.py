"""What all protocols share: the clock table, verdicts, operations, the meeting of peers."""
