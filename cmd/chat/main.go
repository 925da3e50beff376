// Command chat asks a language model something with the vendor's own client library, which takes its key from
// OPENAI_API_KEY and the service's address from OPENAI_BASE_URL. It knows nothing of Tagout: the demo and the tests run it
// in a kid, where the key is a placeholder, to see that an ordinary client does not notice.
//
//	chat [--http1] QUESTION
//
// It prints the streamed answer, then what the service says about the key, a line each.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/openai/openai-go"
	"github.com/openai/openai-go/option"
)

// within bounds the whole conversation.
const within = 30 * time.Second

func main() {
	http1 := flag.Bool("http1", false, "speak HTTP/1.1")
	flag.Parse()
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	if err := chat(ctx, strings.Join(flag.Args(), " "), *http1); err != nil {
		fmt.Fprintln(os.Stderr, "chat:", err)
		os.Exit(1)
	}
}

func chat(ctx context.Context, question string, http1 bool) error {
	options := []option.RequestOption{option.WithMaxRetries(0)}
	if http1 {
		tr := &http.Transport{Protocols: new(http.Protocols)}
		tr.Protocols.SetHTTP1(true)
		options = append(options, option.WithHTTPClient(&http.Client{Transport: tr}))
	}
	client := openai.NewClient(options...)
	stream := client.Chat.Completions.NewStreaming(ctx, openai.ChatCompletionNewParams{
		Model: "practice-1", Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage(question)},
	})
	var answer strings.Builder
	pieces := 0
	for stream.Next() {
		for _, c := range stream.Current().Choices {
			answer.WriteString(c.Delta.Content)
			pieces++
		}
	}
	if err := stream.Err(); err != nil {
		return said(err)
	}
	fmt.Printf("answer in %d pieces: %s\n", pieces, answer.String())
	models, err := client.Models.List(ctx)
	if err != nil {
		return said(err)
	}
	for _, m := range models.Data {
		fmt.Printf("model %s of %s\n", m.ID, m.OwnedBy)
	}
	return nil
}

// said is what the service answered, where it did: the library's text leaves most of that out.
func said(err error) error {
	var e *openai.Error
	if errors.As(err, &e) {
		return fmt.Errorf("status %d: %s", e.StatusCode, e.RawJSON())
	}
	return err
}
