"""What the scripts share: tasks by name, the baselines, studies and their reports. No part of the library."""
