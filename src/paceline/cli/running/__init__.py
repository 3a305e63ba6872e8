"""What commands share: a run from start to end, its mesh and plan, secrets, and how errors reach people."""
