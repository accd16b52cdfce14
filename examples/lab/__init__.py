"""What the scripts share: tasks by name, MAP and its searches, studies and their reports. No part of the library."""
