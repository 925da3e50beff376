package main

var _ = register(technique{
	Name:   "frozen",
	What:   "the whole kid is frozen when the order comes, and thawed just after it",
	Layers: []string{"session", "network"},
	Host:   "freeze",
})
