package main

import (
	"io"
	"net/http"
	"net/url"
	"os"
	"time"
)

var _ = register(technique{
	Name:   "http2",
	What:   "request bodies that never end, as streams of one HTTP/2 connection through the inspecting proxy",
	Layers: []string{"network", "credential"},
	Signs:  []sign{{What: "http2", N: 32 << 10}},
	run: func(s *scene) error {
		api, err := url.Parse(s.api)
		if err != nil {
			return err
		}
		api.Path = "/v1/stream"
		for range 3 {
			go func() {
				for {
					streamBody(s, api.String())
					time.Sleep(50 * time.Millisecond)
				}
			}()
		}
		return nil
	},
})

func streamBody(s *scene, to string) {
	body, pipe := io.Pipe()
	go func() {
		for {
			if _, err := pipe.Write(make([]byte, 1<<10)); err != nil {
				return
			}
			s.did()
			time.Sleep(3 * time.Millisecond)
		}
	}()
	defer body.Close() // ends the writer
	req, err := http.NewRequest(http.MethodPost, to, body)
	if err != nil {
		return
	}
	req.Header.Set("Authorization", "Bearer "+os.Getenv(tokenEnv))
	req.Header.Set(presenterHeader, "agent:"+s.tag)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		s.denied()
		return
	}
	resp.Body.Close() // it ended
}
