"""What stabilizer callbacks share: signals of a step, gradient algebra, alarms and their actions."""
