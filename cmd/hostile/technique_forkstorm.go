package main

var _ = register(technique{
	Name:   "forkstorm",
	What:   "forks up to the pids limit and goes on trying; one child in 64 forks by itself",
	Layers: []string{"session"},
	Signs:  []sign{{What: "processes"}, {What: "refused", N: 1}},
	parts:  "ticks,token,storm",
})
