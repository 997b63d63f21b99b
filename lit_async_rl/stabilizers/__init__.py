"""Building blocks of stabilizer callbacks: signals of a step, gradient algebra, alarms and their actions."""
