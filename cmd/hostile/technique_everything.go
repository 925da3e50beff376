package main

var _ = register(technique{
	Name:   "everything",
	What:   "all at once: ticks, bulk upload, token uses, a fork storm at the pids limit and every way around the proxy",
	Layers: []string{"session", "network", "credential"},
	Signs:  []sign{{What: "processes"}, {What: "refused", N: 1}, {What: "bulk", N: 1 << 20}},
	parts:  "ticks,bulk,token,storm,bypass",
})
