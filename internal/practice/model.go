package practice

import (
	"crypto/subtle"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"
)

// ModelTally is what arrived at the language model's API.
type ModelTally struct {
	Accepted int // requests with the real key
	Refused  int // requests with anything else
	Tokens   int // those among them that showed a kid's token
}

// Model is a language model's API at https://llm.vendor.test, in the form that OpenAI's clients speak. It accepts one key,
// in "Authorization: Bearer …", and is indiscreet: it shows the key that it was sent, in the middle of its answers.
//
//	POST /v1/chat/completions  with stream: server-sent events
//	GET  /v1/models            a list; whoever owns the model is called after the key
type Model struct {
	key string

	mu   sync.Mutex
	seen ModelTally // guarded by mu
}

func (n *Internet) startModel() error {
	n.Model = &Model{key: "sk-practice-" + strings.TrimPrefix(randomSecret(), "vk_live_")}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/chat/completions", n.Model.chat)
	mux.HandleFunc("GET /v1/models", n.Model.models)
	return n.serveHTTP(n.ModelAddr(), 443, NameModel, n.Model.guarded(mux))
}

// Key is the only key that the model accepts: the value to put into the vault, never into a kid.
func (m *Model) Key() string { return m.key }

// Tally returns what has arrived so far.
func (m *Model) Tally() ModelTally {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.seen
}

func (m *Model) guarded(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got := credential(r)
		ok := subtle.ConstantTimeCompare([]byte(got), []byte(m.key)) == 1
		m.mu.Lock()
		if ok {
			m.seen.Accepted++
		} else {
			m.seen.Refused++
		}
		if strings.Contains(got, "tgo_") {
			m.seen.Tokens++
		}
		m.mu.Unlock()
		if !ok {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusUnauthorized)
			fmt.Fprintf(w, `{"error":{"message":"Incorrect API key provided: %q","type":"invalid_request_error","code":"invalid_api_key"}}`, got) // the client is gone
			return
		}
		next.ServeHTTP(w, r)
	})
}

// modelPause lies between two pieces of an answer, so that each is sent by itself.
const modelPause = 5 * time.Millisecond

// chat streams an answer in pieces. The key is one of them, and is sent in two.
func (m *Model) chat(w http.ResponseWriter, r *http.Request) {
	var asked struct {
		Stream   bool `json:"stream"`
		Messages []struct {
			Content string `json:"content"`
		} `json:"messages"`
	}
	if err := json.NewDecoder(r.Body).Decode(&asked); err != nil || !asked.Stream || len(asked.Messages) == 0 {
		http.Error(w, `{"error":{"message":"ask for a stream, with a message"}}`, http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	rc := http.NewResponseController(w)
	send := func(text string) {
		fmt.Fprint(w, text)
		rc.Flush() // the client is gone
		time.Sleep(modelPause)
	}
	half := len(m.key) / 2
	for _, piece := range []string{"You asked: ", asked.Messages[0].Content, ". Your key is ", m.key, "."} {
		event := "data: " + modelEvent(piece) + "\n\n"
		if piece != m.key {
			send(event)
			continue
		}
		at := strings.Index(event, m.key) + half
		send(event[:at])
		send(event[at:])
	}
	send("data: [DONE]\n\n")
}

func modelEvent(text string) string {
	raw, err := json.Marshal(map[string]any{
		"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "practice-1",
		"choices": []any{map[string]any{"index": 0, "delta": map[string]string{"content": text}}},
	})
	if err != nil { // the form is fixed
		return "{}"
	}
	return string(raw)
}

func (m *Model) models(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Echo", m.key)
	json.NewEncoder(w).Encode(map[string]any{"object": "list", "data": []any{ // the client is gone
		map[string]any{"id": "practice-1", "object": "model", "created": 1, "owned_by": m.key},
	}})
}
