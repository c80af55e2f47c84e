"""The fault examination of the weight store: every fault beside what came of it, through real processes."""
