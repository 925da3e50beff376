package main

var _ = register(technique{
	Name:   "replay",
	What:   "the token used as fast as it goes inside, while an accomplice outside replays it a thousand times a second",
	Layers: []string{"credential"},
	Signs:  []sign{{What: "uses", N: 50}, {What: "replays", N: 200}},
	Replay: 1000,
	run: func(s *scene) error {
		s.uses = 500
		for range 3 {
			go useToken(s.config, nil)
		}
		return nil
	},
})
